"""The import path of the deployment on Ray: `serve run powerinfer.ray_serve:app`."""

from .integrations.ray_serve import Answers, app, deployment

__all__ = ["Answers", "app", "deployment"]
