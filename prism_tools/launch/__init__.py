"""Starting programs: what is passed on, and what every start has in common."""
