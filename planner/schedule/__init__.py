"""Timeline -> certified, replayed plan; explanations and baselines."""
