"""prism-slice: which ranks run for real together, their local times, and crossing operations measured alone (P§5.3)."""
