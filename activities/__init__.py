"""Activities: the calls that workflows make to nodes, people and files."""
