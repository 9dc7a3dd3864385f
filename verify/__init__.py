"""The gatekeeper: decides, from measurements that an author cannot influence, what may be shown to a reviewer."""
