"""How a layer's states become the bytes of its columns: `planes` is lossless, `fp8` is not."""
