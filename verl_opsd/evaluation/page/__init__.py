"""The report as one HTML file: data, conversations, plots, template."""
