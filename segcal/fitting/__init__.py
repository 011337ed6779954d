"""From weighted voxels to fitted parameters."""
