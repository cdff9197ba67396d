"""Who may do what: what an order is signed with, and whether its caller may give it."""
