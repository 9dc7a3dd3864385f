"""Core of the application: settings, records, git plumbing, run store, sandbox. Knows nothing above it."""
