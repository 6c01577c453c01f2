"""Installing, upgrading and removing gdq's schemas."""
