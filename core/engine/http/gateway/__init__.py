"""A gateway: servers elsewhere behind one listener, which places requests among them and passes answers on."""
