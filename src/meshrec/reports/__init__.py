"""Reports about plans: text and pages."""
