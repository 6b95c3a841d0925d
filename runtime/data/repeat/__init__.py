"""What makes a loader repeat itself after a resume, and what shows whether it did."""
