"""Processes for what may take a process down: a task is a function of bytes that runs in a child, within limits of CPU
time and memory that the kernel keeps. A child that breaks one is killed and replaced."""
