"""Processes and remote calls of the roles of a run: one contract for one machine and for a Ray cluster."""
