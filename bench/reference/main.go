// A plain admission webhook in Go on Kubernetes' own types: the baseline of bench/webhook.py.
//
// It does less than Quotient: it checks vcuda-core, and returns a patch of two operations.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const core = corev1.ResourceName("inspur.com/vcuda-core")

type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

func main() {
	address := flag.String("address", "127.0.0.1:9444", "address to listen on")
	certificate := flag.String("certificate", "", "certificate file")
	key := flag.String("key", "", "key file")
	flag.Parse()
	http.HandleFunc("POST /mutate", func(w http.ResponseWriter, r *http.Request) { answer(w, r, mutate) })
	http.HandleFunc("POST /validate", func(w http.ResponseWriter, r *http.Request) { answer(w, r, validate) })
	log.Fatal(http.ListenAndServeTLS(*address, *certificate, *key, nil))
}

func answer(w http.ResponseWriter, r *http.Request, decide func(*corev1.Pod, *admissionv1.AdmissionResponse) error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(body, &review); err != nil || review.Request == nil {
		http.Error(w, "not an AdmissionReview", http.StatusBadRequest)
		return
	}
	var pod corev1.Pod
	if err := json.Unmarshal(review.Request.Object.Raw, &pod); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	response := &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	if err := decide(&pod, response); err != nil {
		response.Allowed = false
		response.Result = &metav1.Status{Message: err.Error(), Code: http.StatusForbidden}
	}
	out, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: response})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(out)
}

func mutate(pod *corev1.Pod, response *admissionv1.AdmissionResponse) error {
	cores := map[string]int64{}
	for _, container := range pod.Spec.Containers {
		if asked, ok := container.Resources.Limits[core]; ok {
			cores[container.Name] = asked.Value()
		}
	}
	limits, err := json.Marshal(cores)
	if err != nil {
		return err
	}
	patch, err := json.Marshal([]operation{
		{"add", "/metadata/annotations/inspur.com~1vcuda-limits", string(limits)},
		{"add", "/spec/schedulerName", "quotient-scheduler"},
	})
	if err != nil {
		return err
	}
	kind := admissionv1.PatchTypeJSONPatch
	response.Patch, response.PatchType = patch, &kind
	return nil
}

func validate(pod *corev1.Pod, _ *admissionv1.AdmissionResponse) error {
	for _, container := range pod.Spec.Containers {
		if asked, ok := container.Resources.Limits[core]; ok && asked.Value() > 100 && asked.Value()%100 != 0 {
			return fmt.Errorf("%s: %s: neither a part of one GPU nor whole GPUs", container.Name, asked.String())
		}
	}
	return nil
}
