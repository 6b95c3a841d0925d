"""What runs say of themselves: the report and its history, the times of their last captures, and both beside a plan."""
