"""Messages between workflows, activities and the command line: data types and workflow ids."""
