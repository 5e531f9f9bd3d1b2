"""Batches: files of requests that are answered while nobody waits, and files with the answers (OpenAI's Batch API).

``records``: what files and batches are. ``store``: where they lie. ``lines``: from a file to requests, and to its
answers. ``idle``: when a line may run. ``runner``: takes each batch from state to state. ``batches``: all of it, for
those who ask.
"""
