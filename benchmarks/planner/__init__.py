"""How good and how quick the planner is, next to others."""
