"""What tests need, public: a toy world, and conformance suites that authors of plugins inherit."""
