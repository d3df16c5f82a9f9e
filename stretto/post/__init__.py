"""Post-training stages."""
