"""Analyses by name. A new one needs its function, a line here, and one in `flcore/config/analyses.py`."""

from __future__ import annotations

from collections.abc import Mapping

from flcore.analyses import by_class, generated, gradcam, inversion, tsne
from flcore.analyses.base import Analysis, has_global_model, keeps_trained_models, was_calibrated

_CALIBRATED = (has_global_model, was_calibrated)
_TRAINED = (keeps_trained_models, tsne.chosen_client_trained, tsne.can_show)

ANALYSES: Mapping[str, Analysis] = {
    "class_heatmap": Analysis(by_class.class_heatmap),
    "class_heatmap_trained": Analysis(by_class.class_heatmap_trained, (keeps_trained_models,)),
    "confusion": Analysis(by_class.confusion),
    "averaged_bodies": Analysis(by_class.averaged_bodies, (by_class.has_bodies_and_prototypes,)),
    "tsne": Analysis(tsne.tsne, (tsne.can_show,)),
    "tsne_trained": Analysis(tsne.tsne_trained, _TRAINED),
    "tsne_projections": Analysis(tsne.tsne_projections, (tsne.has_projections, tsne.can_show)),
    "tsne_calibration": Analysis(tsne.tsne_calibration, (*_CALIBRATED, tsne.can_show)),
    "tsne_calibration_trained": Analysis(tsne.tsne_calibration_trained, (*_CALIBRATED, *_TRAINED)),
    "tsne_prototypes": Analysis(tsne.tsne_prototypes),
    "tsne_generated": Analysis(generated.tsne_generated, (generated.has_generated_features, tsne.can_show)),
    "virtual_images": Analysis(generated.virtual_sheet, (generated.has_virtual_images,)),
    "generator_distances": Analysis(generated.generator_distances, (generated.has_generated_features,)),
    "inversion": Analysis(inversion.inversion, (has_global_model,)),
    "inversion_search": Analysis(inversion.inversion_search, (has_global_model,)),
    "gradcam": Analysis(gradcam.gradcam_cases, (*_CALIBRATED, gradcam.has_convolution)),
}
