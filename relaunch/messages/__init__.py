"""What workflows, activities and the command line say to each other: data, and the ids of workflows."""
