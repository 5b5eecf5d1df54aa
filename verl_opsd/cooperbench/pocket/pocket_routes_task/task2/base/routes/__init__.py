"""A tiny router for paths."""
