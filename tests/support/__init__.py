"""What tests share: fixtures, helpers, contracts."""
