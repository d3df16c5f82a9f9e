"""Pictures of coloured shapes: what was asked for, drawn, read back and judged exactly. No torch."""
