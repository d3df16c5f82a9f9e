"""Everything that draws: reports of runs as pictures and one page."""
