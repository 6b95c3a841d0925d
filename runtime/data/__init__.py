"""The resumable DataLoader."""
