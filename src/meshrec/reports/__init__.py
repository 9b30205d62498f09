"""What people read of a plan: text and pages."""
