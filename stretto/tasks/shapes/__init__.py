"""Pictures of coloured shapes: requests, exact drawing, recognition and comparison. No torch."""
