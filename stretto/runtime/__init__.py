"""Where roles run and how they call each other: one machine or a Ray cluster, under one contract."""
