"""The resumable DataLoader: process_generators.py holds generators, epoch_seeds.py seeds, seeded_dataset.py samples."""
