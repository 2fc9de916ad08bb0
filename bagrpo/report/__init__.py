"""What a run tells: files of metrics and rollouts, and its progress while it goes."""
