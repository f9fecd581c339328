"""What every room uses: masks, positions, caches, kernels, costs, specs, and the contract of a part."""
