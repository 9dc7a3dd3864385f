"""The gatekeeper: decides, from measurements that the author of a candidate cannot influence, what may be shown to a reviewer."""
