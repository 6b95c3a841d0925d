"""Chooses how often to checkpoint, without a clock or torch: controller.py decides, policy.py is CheckFreq's rule."""
