"""What is measured on a policy."""
