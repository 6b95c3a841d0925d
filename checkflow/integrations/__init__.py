"""Other libraries' doors to checkflow's store, one module a library; each is imported by those who use it alone."""
