"""Tables, figures and pages of all runs."""
