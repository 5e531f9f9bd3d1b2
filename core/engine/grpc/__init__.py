"""gRPC, beside HTTP: the service ``vllm.grpc.engine.VllmEngine``, health checks and reflection.

The only package that imports ``grpc``, once a server is asked to listen: see :mod:`engine.grpc.opening`.
"""
