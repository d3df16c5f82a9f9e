"""Which Subnet: rankings, latency, the search, and the gate before one is cut out."""
