"""``engine plan``: does a model fit a device, how many requests at once, how fast and at what price; nothing is loaded.

``options`` reads the command line, ``workload`` makes the requests, ``device`` says what the device is, ``cost`` what a
step takes on it, ``predict`` simulates, ``candidates`` lists what else could be set, ``planning`` puts them together,
``report`` prints, and ``live`` scores a prediction against a running server.
"""
