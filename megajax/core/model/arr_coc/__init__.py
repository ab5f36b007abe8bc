"""The networks of ARR-COC, which give the regions of images their detail."""
