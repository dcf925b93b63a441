"""Budget plans: the region's joint graph, prices, exact solvers, and plans as values."""
