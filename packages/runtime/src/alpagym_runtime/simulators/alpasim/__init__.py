"""AlpaSim behind the `Simulator` protocol, and any policy as an AlpaSim driver."""
