"""Pictures: requirements of a request, prompts, image generators, and checks of the pictures."""
