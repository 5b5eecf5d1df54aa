"""A simple configuration format."""
