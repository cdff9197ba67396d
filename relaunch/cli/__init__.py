"""What people type and read: files and flags in; tables, JSON and live views out. Refuses to reach a node by itself."""
