"""Planning a run for a pod, on a machine without one."""
