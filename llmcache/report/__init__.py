"""Renders typed results: tables, JSON, plots and HTML pages."""
