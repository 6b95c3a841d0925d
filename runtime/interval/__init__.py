"""Chooses how often to checkpoint, from given times: controller.py decides, algorithm.py has CheckFreq's rule."""
