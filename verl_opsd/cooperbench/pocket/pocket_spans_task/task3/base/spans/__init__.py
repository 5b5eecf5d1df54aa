"""Sets of whole numbers."""
