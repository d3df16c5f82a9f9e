"""Generated worlds whose problems have a state: an agent acts in them over many turns, and what it leaves is judged."""
